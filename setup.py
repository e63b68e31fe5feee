"""Builds the compiled kernels when there is a C compiler; everything else is in pyproject.toml.

A failing build is a warning, not an error: `python -m deepinfer doctor` then says why the native ops are missing.
"""

from glob import glob

from setuptools import Extension, setup

FOLDER = "src/deepinfer/kernels/native/csrc"

# -ffp-contract=off: products and sums are fused only where the code says so, see common.h.
# Threads are the kernels' own, see pool.c.
native = Extension(
    "deepinfer.kernels.native._native",
    sources=sorted(glob(f"{FOLDER}/*.c")),
    depends=glob(f"{FOLDER}/*.h"),
    extra_compile_args=["-std=c11", "-O3", "-pthread", "-ffp-contract=off", "-fvisibility=hidden"],
    extra_link_args=["-pthread"],
    optional=True,
)

setup(ext_modules=[native])
