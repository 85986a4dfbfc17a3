"""`dcpcomm bench`, where there is no script of that name on the path.

python -m dcpcomm.bench.merge --transport loopback_peer --rivals --json merges.json     # ranks: streams of one GPU
torchrun --nproc-per-node 2 -m dcpcomm.bench.merge --rivals --json merges.json          # a process for each GPU
"""

from __future__ import annotations

import sys

from dcpcomm.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.argv[1:1] = ["bench"]
    main()
