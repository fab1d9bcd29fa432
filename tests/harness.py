"""harness.py - what the tests of the scripts share."""
import importlib.machinery
import importlib.util
import os
import sys
import unittest
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))


def load(script):
    """A file of scripts/ whose name is not that of a module, as one."""
    loader = importlib.machinery.SourceFileLoader(script.replace("-", "_"), str(SCRIPTS / script))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


def main():
    """Runs the tests of the file that is running; closes with "N passed, N failed"."""
    os.environ["LC_ALL"] = "C.UTF-8"
    result = unittest.main(exit=False, verbosity=0).result
    bad = len(result.failures) + len(result.errors)
    print(f"{Path(sys.argv[0]).stem}: {result.testsRun - bad} passed, {bad} failed")
    sys.exit(bad > 0)
