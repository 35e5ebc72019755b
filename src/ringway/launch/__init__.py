"""How a process learns its place in the job: discovery of the launcher, and the rendezvous of all ranks at a store."""

from ringway.forwarding import attributes_of

__getattr__ = attributes_of("launch")
