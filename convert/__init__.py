"""Command line around checkpoints (`python -m convert`, installed as `dsv4-convert`)."""
