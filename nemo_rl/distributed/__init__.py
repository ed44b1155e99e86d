"""Ray and torch.distributed: everything that starts, addresses, feeds and stops worker processes.

Map (nothing is imported here; the driver must not pay for torch or ray):

* ``device``             which device a run uses; torch-free.
* ``environment``        the environment variables of policy and generation workers; one place for all of them.
* ``ray_runtime``        start a loopback-only local cluster or join ``RAY_ADDRESS``; stop it without leftovers.
* ``virtual_cluster``    placement groups: one bundle per worker slot, shared by colocated worker groups.
* ``worker_groups``      spawn ranks, dispatch calls, collect results, turn a failure into one ``WorkerError``.
* ``worker_host``        the actor around each worker; imports the worker's class in its own process.
* ``named_sharding``     which rank holds which slice of the data over named axes.
* ``rendezvous``         a TCPStore on a port that the system chose, and the process group over it; needs torch.
* ``collectives``        typed collectives that do nothing in a process without a process group; needs torch.
* ``batched_data_dict``  the batch type; needs torch.
"""
