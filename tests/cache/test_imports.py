"""The package works without torch and loads quickly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import deepinfer

SRC = str(Path(deepinfer.__file__).parents[1])

PROBE = """
import sys, time
sys.path.insert(0, {src!r})
import attrs, numpy, numpy.typing
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "triton", "transformers"):
            raise AssertionError(name + " was imported")
sys.meta_path.insert(0, Refuse())
start = time.process_time()
import deepinfer.cache as cache
seconds = time.process_time() - start
assert not {{"torch", "triton", "scipy"}} & set(sys.modules)
book = cache.PagedBook(8, page_tokens=2)
book.publish(numpy.arange(4, dtype=numpy.int32), book.allocate(2))
assert book.match(numpy.arange(9, dtype=numpy.int32)).num_tokens == 4
print(seconds)
"""


def test_imports_no_torch_and_takes_little_time():
    run = [subprocess.run([sys.executable, "-c", PROBE.format(src=SRC)], capture_output=True, text=True) for _ in "12"]
    assert all(r.returncode == 0 for r in run), run[0].stderr + run[1].stderr
    assert min(float(r.stdout) for r in run) < 0.150


def test_exported_names_exist():
    import deepinfer.cache as cache

    assert all(hasattr(cache, name) for name in cache.__all__)
    assert sorted(cache.__all__) == cache.__all__
