"""What many rooms need and none owns: files, devices, precision, ranks, the processor, figures."""
