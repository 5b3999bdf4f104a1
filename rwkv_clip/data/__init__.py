"""Data: RecordIO shards, sampling, packing, and the DALI pipeline."""
