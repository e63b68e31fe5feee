"""Everything this library brings, as records; strings only, so that listing the parts imports none of them."""

from __future__ import annotations

from collections.abc import Iterator

from .hooks import hookimpl
from .kinds import OP_KINDS
from .record import Record

__all__ = ["deepinfer_records"]


@hookimpl
def deepinfer_records() -> Iterator[Record]:
    """The parts of this library, through the hook that plugins use."""
    yield from _ops()
    yield from _policies()
    yield from _readers()
    yield from _accelerators()


def _ops() -> Iterator[Record]:
    for kind in OP_KINDS:
        make = "make_" + kind.removeprefix("op.")
        accepts = "deepinfer.kernels.usable:reference_accepts"
        yield Record(kind, "reference", f"deepinfer.kernels.reference:{make}", accepts=accepts)
        yield Record(
            kind,
            "eager",
            f"deepinfer.kernels.eager:{make}",
            priority=50,
            accepts="deepinfer.kernels.usable:eager_accepts",
        )
        yield Record(
            kind,
            "native",
            f"deepinfer.kernels.native:{make}",
            devices="cpu",
            priority=100,
            probe="deepinfer.kernels.native:probe",
            accepts="deepinfer.kernels.native:accepts",
        )
        yield Record(
            kind,
            "triton",
            f"deepinfer.kernels.triton:{make}",
            devices=("cuda", "cpu"),
            dtypes=("float32", "float16", "bfloat16"),
            # behind the vendor's products, which eager torch calls but which are not invariant
            priority=40 if kind == "op.linear" else 100,
            probe="deepinfer.kernels.usable:triton_probe",
            accepts="deepinfer.kernels.usable:triton_accepts",
        )

    yield Record(
        "fused.decoder_layer",
        "native",
        "deepinfer.kernels.native:make_decoder_layer",
        devices="cpu",
        priority=100,
        probe="deepinfer.kernels.native:probe",
        accepts="deepinfer.kernels.native:accepts",
    )


def _policies() -> Iterator[Record]:
    for name, attribute in {
        "fcfs": "Fcfs",
        "shortest-prompt": "ShortestPrompt",
        "priority": "Priority",
        "fair-share": "FairShare",
    }.items():
        yield Record(
            "scheduler.policy", name, f"deepinfer.schedulers:{attribute}", priority=100 if name == "fcfs" else 0
        )


def _readers() -> Iterator[Record]:
    for name, make, refuse in (
        ("safetensors", "open_folder", "not_a_folder"),
        ("gguf", "open_gguf_file", "not_gguf"),
        ("hub", "open_hub", "not_a_hub_id"),
    ):
        accepts = f"deepinfer.models.formats:{refuse}"
        yield Record("checkpoint", name, f"deepinfer.models.checkpoint:{make}", accepts=accepts)
    for model_type in ("llama", "mistral", "qwen2"):
        yield Record("model", model_type, "deepinfer.models.llama:build")
    for name in ("hf", "gguf"):
        accepts = f"deepinfer.models.formats:tokenizer_is_{name}"
        yield Record("tokenizer", name, f"deepinfer.models:{name}_tokenizer", accepts=accepts)
    accepts = "deepinfer.models.formats:jinja_accepts"
    yield Record("chat_format", "jinja", "deepinfer.models:jinja_chat_format", accepts=accepts)


def _accelerators() -> Iterator[Record]:
    yield Record("accelerator", "cpu", "deepinfer.accelerator:cpu")
    yield Record(
        "accelerator",
        "nvidia",
        "deepinfer.accelerator:nvidia",
        priority=100,
        probe="deepinfer.accelerator:why_no_nvidia",
    )
    yield Record(
        "accelerator",
        "ascend",
        "deepinfer.accelerator:ascend",
        priority=90,
        probe="deepinfer.accelerator:why_no_ascend",
    )
