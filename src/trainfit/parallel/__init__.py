"""Train one model on several GPUs: data parallel, sharded optimizer state, fully sharded parameters.

Each wrapper works on its own, with any module, over an initialised ``torch.distributed`` process group.
"""

from trainfit.parallel.data_parallel import DataParallel
from trainfit.parallel.fully_sharded import FullySharded
from trainfit.parallel.sharded_optimizer import ShardedOptimizer

__all__ = ["DataParallel", "FullySharded", "ShardedOptimizer"]
