"""The only use of the private variable in which torch keeps a data-loading worker's `WorkerInfo`."""

from __future__ import annotations

from typing import Any

from torch.utils.data._utils import worker as torch_worker


def replace_worker_info(info: Any) -> Any:
    """Make `get_worker_info` return ``info`` in this process; return what it returned before."""
    previous, torch_worker._worker_info = torch_worker._worker_info, info
    return previous
