"""Write a data set as shards that are read fast: tar files or Parquet."""
