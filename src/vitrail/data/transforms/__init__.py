"""What happens to pixels between a file and a batch: decoding, fitting, augmentation, mixing."""
