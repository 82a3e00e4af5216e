"""Where samples come from: folders, tables, tar shards, Parquet, the hub, memory."""
