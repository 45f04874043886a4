"""Conversion from any format that is read to any that is written, within a budget of memory, resumable."""

from vescale_ckpt.interop.convert.options import ConvertOptions, ConvertReport
from vescale_ckpt.interop.convert.run import convert

__all__ = ["ConvertOptions", "ConvertReport", "convert"]
