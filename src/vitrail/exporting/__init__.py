"""Models for other runtimes: ONNX, int8, torch.export, AOTInductor, OpenVINO; executed before they count."""
