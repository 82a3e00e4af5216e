"""What a target is: one label, tags, numbers, levels or attributes of an image; how it is learned and answered."""
