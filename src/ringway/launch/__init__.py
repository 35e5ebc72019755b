"""How a process learns its place in the job: discovery, and the meeting of all ranks at a store."""
