"""From the bytes of a file to the pixels of a batch: decode, preprocess, augment, mix."""
