"""Refit: carrying the trained weights from the policy workers to the generation engines.

interfaces.py    the values that travel: manifest, payload, report (no torch)
checksum.py      the one checksum that both ends compute
transport.py     the Ray object store as carrier
synchronizer.py  one refit as the driver sees it
"""
