"""Classes of Megatron's own that its pickles name: arguments and enumerations, all of them only data."""

from __future__ import annotations

from typing import Final

from vescale_ckpt.interop.torchsave.allowed import with_records

MAKERS: Final = with_records(
    "argparse.Namespace",
    "types.SimpleNamespace",
    "megatron.core.enums.ModelType",
    "megatron.model.enums.ModelType",
    "megatron.legacy.model.enums.ModelType",
    "megatron.core.enums.Fp8Recipe",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.AttnMaskType",
    "megatron.core.transformer.enums.AttnType",
    "megatron.core.transformer.enums.LayerType",
    "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState",
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "signal.Signals",
)
