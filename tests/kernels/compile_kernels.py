"""Compiles the Triton kernels for an architecture: `compile_kernels.py CAPABILITY [NAME,NAME]`; prints JSON.

Run by test_triton_compiles.py in a process of its own: where the interpreter is on, nothing can be compiled.
"""

import json
import sys
from collections.abc import Iterator

import attrs
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from deepinfer.kernels.triton import activation, attention, cache, linear, norm, rotary, sampling, splits

BF16 = (
    "q",
    "k",
    "v",
    "x",
    "weight",
    "bias",
    "out",
    "residual",
    "normed",
    "total",
    "k_pool",
    "v_pool",
    "q_out",
    "k_out",
)
POINTERS = {
    **{f"{name}_ptr": "*bf16" for name in BF16},
    **{f"{name}_ptr": "*fp32" for name in ("part", "stat", "best", "logits")},
    "seed_ptr": "*i64",
    "ids_ptr": "*i64",
    "greedy_ptr": "*u8",
}
SCALARS = {"scale": "fp32", "eps": "fp32"}


@attrs.frozen
class Kernel:
    name: str
    function: object
    constants: dict
    options: dict = attrs.field(factory=dict)
    #: Argument types that differ from POINTERS and SCALARS.
    types: dict = attrs.field(factory=dict)

    def build(self, capability: int) -> dict:
        names = self.function.arg_names
        signature = {name: self._type(name) for name in names}
        aligned = [i for i, name in enumerate(names) if name.endswith("_ptr") or name.startswith("stride")]
        source = ASTSource(
            fn=self.function,
            signature=signature,
            constexprs={(names.index(name),): value for name, value in self.constants.items()},
            attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
        )
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=self.options)
        return {"wgmma": "wgmma" in made.asm["ptx"], "shared": made.metadata.shared}

    def _type(self, name: str) -> str:
        if name in self.constants:
            return "constexpr"
        default = POINTERS.get(name, "*i32") if name.endswith("_ptr") else SCALARS.get(name, "i32")
        return self.types.get(name, default)


def attention_kernels() -> Iterator[Kernel]:
    for name, block_m, num_warps, partial, in_order in (
        ("prefill", 128, 4, False, False),
        ("decode", 16, 4, True, False),
        ("invariant prefill", 64, 4, False, True),
        ("invariant decode", 64, 4, True, False),
        ("narrow invariant decode", 16, 1, True, False),
    ):
        shape = {"WIDTH": 128, "BLOCK_D": 128, "PAGE": 16, "GROUP": 4, "BLOCK_M": block_m, "BLOCK_N": 64}
        flags = {"PARTIAL": partial, "IN_ORDER": in_order}
        options = {"num_warps": num_warps, "num_stages": 3}
        yield Kernel(name, attention._attend, shape | flags, options)
    yield Kernel("merge", splits._merge, {"WIDTH": 128, "BLOCK_D": 128})


def linear_kernels() -> Iterator[Kernel]:
    for t in linear.TILES:
        tile = {"BLOCK_M": t.block_m, "BLOCK_N": t.block_n, "BLOCK_K": t.block_k}
        constants = {"num_in": 4096, "HAS_BIAS": True, "EVEN_K": True, **tile}
        options = {"num_warps": t.num_warps, "num_stages": t.num_stages}
        yield Kernel(f"linear {t.block_m} x {t.block_n}", linear._linear, constants, options)


def row_kernels() -> Iterator[Kernel]:
    unfused = {"enable_fp_fusion": False}
    for ids in (False, True):
        constants = {"HAS_IDS": ids, "PURPOSE": 0, "GROUPS": 512}
        yield Kernel(f"scan {ids}", sampling._scan, constants, unfused)
        yield Kernel(f"choose {ids}", sampling._choose, {"HAS_IDS": ids, "BLOCK": 64}, types={"out_ptr": "*i64"})
    yield Kernel("noise", sampling._noise, {"PURPOSE": 3, "GROUPS": 512}, unfused, {"out_ptr": "*fp32"})
    yield Kernel("norm", norm._rms_norm, {"HAS_RESIDUAL": True, "BLOCK": 4096})
    yield Kernel("rope", rotary._rope, {"HALF": 64, "BLOCK": 64, "HEADS": 16}, types={"table_ptr": "*fp32"})
    yield Kernel("silu_mul", activation._silu_mul, {"BLOCK": 1024})
    yield Kernel("cache_write", cache._cache_write, {"WIDTH": 128, "PAGE": 16, "BLOCK": 1024})


def main(capability: int, wanted: list[str]) -> None:
    kernels = [*attention_kernels(), *linear_kernels(), *row_kernels()]
    chosen = [kernel for kernel in kernels if not wanted or kernel.name in wanted]
    print(json.dumps({kernel.name: kernel.build(capability) for kernel in chosen}))


if __name__ == "__main__":
    main(int(sys.argv[1]), [name for name in sys.argv[2].split(",") if name])
