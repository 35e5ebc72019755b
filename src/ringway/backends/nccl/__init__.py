"""The backend over torch's NCCL."""
