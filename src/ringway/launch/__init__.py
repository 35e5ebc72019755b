"""How a process learns its place in the job: discovery of the launcher, and the rendezvous of all ranks at a store."""
