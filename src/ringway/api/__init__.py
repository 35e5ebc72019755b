"""torch.distributed's functions: collectives, object collectives and groups."""
