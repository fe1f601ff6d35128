import os

import torch

# Without a GPU the kernels run under Triton's interpreter, which is chosen when triton is first imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
