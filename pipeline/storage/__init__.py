"""The workspace: records, digests, and the backends that hold the bytes."""
