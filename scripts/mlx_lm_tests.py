"""Run mlx-lm's own tests of generation and prompt caches on the embedded model, with kvant's caches and with
its own.

Usage: python scripts/mlx_lm_tests.py FOLDER: the folder ``tests`` of a copy of mlx-lm's repository. Its files
    run as
they are, twice. ``load`` gives the embedded model; the second time its ``make_cache`` is kvant's, and so are
mlx-lm's functions of prompt caches. A test that passes the first time alone is exit code 1, but for those of
LOST.
"""

import importlib
import sys
import unittest
from functools import partial
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import kvant  # isort: skip  (before MLX: it loads a faster BLAS)
import mlx.core as mx
import mlx_lm.generate
import mlx_lm.utils

POCKET = Path(kvant.__file__).parent / "pocket"
MODULES = ("test_generate", "test_prompt_cache")
TAKEN = ("trim_prompt_cache", "can_trim_prompt_cache")
LOST = {
    "test_cache_to_quantized": "a cache of kvant's is quantized from its first token: it has no to_quantized",
}
own_load = mlx_lm.utils.load


def load(*_: Any, mounted: bool) -> tuple[Any, Any]:
    """The embedded model as mlx-lm loads it, with kvant's caches or its own."""
    model, tokenizer = own_load(str(POCKET))
    model.set_dtype(mx.float32)
    if mounted:
        model.make_cache = partial(kvant.make_prompt_cache, model, 1024, kv_bits=0)
    return model, tokenizer


def failed(mounted: bool) -> dict[str, str]:
    """What each test that fails says."""
    with mock.patch.object(mlx_lm.utils, "load", partial(load, mounted=mounted)):
        modules = [importlib.reload(importlib.import_module(name)) for name in MODULES]
        for module, name in product(modules, TAKEN if mounted else ()):
            setattr(module, name, getattr(kvant, name))
        suite = unittest.TestSuite(map(unittest.defaultTestLoader.loadTestsFromModule, modules))
        result = unittest.TextTestRunner(stream=StringIO(), buffer=True).run(suite)
    found = {test.id().rpartition(".")[2]: text for test, text in [*result.failures, *result.errors]}
    whose = "kvant's" if mounted else "mlx-lm's"
    print(f"{whose} caches: {result.testsRun - len(found)} of {result.testsRun} tests pass")
    return found


def main() -> int:
    """Run the files with both. Returns the exit code."""
    sys.path.insert(0, sys.argv[1])
    # The repository may be at another release than the one that is installed.
    vars(sys.modules["mlx_lm.generate"]).setdefault("StopSequenceMatcher", None)
    before, now = failed(mounted=False), failed(mounted=True)
    print(f"fail with both, on this model or with the installed mlx-lm: {', '.join(sorted(before))}")
    lost = {name: text for name, text in now.items() if name not in before}
    for name, text in lost.items():
        print(f"{name}: {LOST.get(name, text)}")
    return int(lost.keys() != LOST.keys())


if __name__ == "__main__":
    sys.exit(main())
