"""Public names are filled in by the modules of this package."""
