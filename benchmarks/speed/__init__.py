"""Speed, measured by asv: record, select, watch, loop, images and streams.

    pip install asv
    cd benchmarks
    asv run HEAD^!               # one commit; --quick tries each once
    asv continuous HEAD^ HEAD    # two commits, in turns

In a clone that is installed already: ``asv run --python=same``. The results are kept for each
commit and machine in ``.asv/``. Times of different commits are compared on one idle machine only.
"""

import torch

# More threads make the times of small tensors uneven.
torch.set_num_threads(1)
