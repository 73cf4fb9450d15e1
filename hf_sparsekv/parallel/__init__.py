"""Several devices: which process does what, and the little that the processes tell each other.

Tensor parallelism spreads one model over the ranks of a replica, KV head by KV head; data parallelism runs replicas
that share nothing but files. This room knows processes and groups, not requests.
"""
