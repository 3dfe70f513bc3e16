"""``torchrun`` for the processes of an experiment: it ends when the experiment does.

Run as ``python -m fineprune.launch.torchrun``, with the arguments of ``torchrun``.
"""

import os

from torch.distributed.run import main

from fineprune.launch.follow_parent import PARENT_VARIABLE, follow_parent_if_told

if __name__ == "__main__":
    follow_parent_if_told(elsewhere=True)  # In a job of several nodes, srun is between the two.
    # The ranks are children of this process, so they follow it and not its parent.
    if PARENT_VARIABLE in os.environ:
        os.environ[PARENT_VARIABLE] = str(os.getpid())
    main()
