"""safetensors, as Hugging Face uses it: export of snapshots, import of files and folders."""

from vescale_ckpt.interop.safetensors.export import ExportReport, ExportTarget, check_target, export_snapshot
from vescale_ckpt.interop.safetensors.file import SafetensorsFile, read_safetensors_header
from vescale_ckpt.interop.safetensors.folder import HfFolder, load_hf, open_hf
from vescale_ckpt.interop.safetensors.header import SafetensorsHeader, TensorEntry
from vescale_ckpt.interop.safetensors.plan import ExportOptions, ExportPlan, plan_export

__all__ = [
    "ExportOptions",
    "ExportPlan",
    "ExportReport",
    "ExportTarget",
    "HfFolder",
    "SafetensorsFile",
    "SafetensorsHeader",
    "TensorEntry",
    "check_target",
    "export_snapshot",
    "load_hf",
    "open_hf",
    "plan_export",
    "read_safetensors_header",
]
