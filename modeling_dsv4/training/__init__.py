"""Training: public names of this package."""

from .data_collator import Dsv4DataCollator

__all__ = ["Dsv4DataCollator"]
