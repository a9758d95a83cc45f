"""A pytest plugin: the kernel that `make sanitize` compiled, in place of the installed one."""

import importlib.util
import os
import sys

name = "einsight.engines.native._native"
spec = importlib.util.spec_from_file_location(name, os.environ["EINSIGHT_SANITIZED_KERNEL"])
if spec is None or spec.loader is None:
    raise ImportError(f"no module in {os.environ['EINSIGHT_SANITIZED_KERNEL']}")
sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[name])
