"""One file for each format of weights: ours, Google, timm, torchvision, Hugging Face."""
