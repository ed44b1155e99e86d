"""Published draft checkpoints <-> one canonical form: pure functions on dicts and names, no files, no torch.

    base      DraftAdapter: what an algorithm's draft is, in configuration, in files and in the engine
    fields    sizes, positions and feature ids of a config.json
    names     tensor names of every publisher -> one set of names
    <algo>    one adapter per algorithm

Whatever a reader would have to guess is an error that names the key to set.
"""
