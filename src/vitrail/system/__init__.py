"""Services that many packages share: files, devices, precision, ranks, the processor, figures."""
