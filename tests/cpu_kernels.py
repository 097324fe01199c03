"""What this machine's processor can do, where a test's outcome depends on it."""

from __future__ import annotations

import torch

# DeepSpeed asks the same before it keeps parameters in fp16: so, ZeRO refuses 16-mixed on most processors only.
FP16: bool = torch.ops.mkldnn._is_mkldnn_fp16_supported()
