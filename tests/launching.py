"""`torchrun` whose processes are forks of the launcher: `python -m amalgam.tests.launching OPTIONS -m MODULE WORDS`.

The launcher, its agent and their rendezvous are those of torch.
"""

from __future__ import annotations

import runpy
import sys

from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args


def rank(module: str, *arguments: str) -> None:
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    options = parse_args(sys.argv[1:])  # type: ignore[no-untyped-call]
    options.rdzv_backend = "c10d"
    options.rdzv_endpoint = options.rdzv_endpoint or "localhost:0"
    config, *_ = config_from_args(options)
    config.start_method = "fork"
    elastic_launch(config, rank)(options.training_script, *options.training_script_args)
