"""Services that many packages share: events, results, intervals, files, devices, precision, ranks, figures."""
