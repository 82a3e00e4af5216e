"""Make a classifier for a folder of photos, measure it, look inside it, export it and use it.

    python examples/classify_photos.py photos/

photos/ has a folder of images for each class. What is written goes into ./runs. Settings may follow, such as
schedule.steps=100.
"""

import sys
from pathlib import Path

import vitrail

photos, *settings = sys.argv[1:] or ["photos/"]

print(vitrail.check_data(photos))  # broken images, duplicates, classes out of balance

quick = vitrail.finetune(photos, quick=True)  # a head on frozen features, in seconds
print(quick)  # accuracy, and images whose labels look wrong

result = vitrail.finetune(photos, settings=settings)  # the whole model; the same call continues a stopped run
print(result)

print(vitrail.evaluate(result.model, photos, split="val"))  # on the tenth of the photos that training did not see
print(vitrail.inspect(result.folder, images=photos))  # a page that shows what the model looks at

exported = vitrail.export(result.model, "runs/photos.onnx", to="onnx")  # compared with the model before it is written
print(exported)

photo = next(path for path in Path(photos).rglob("*") if path.is_file())
for model in (result.model, "runs/photos.onnx"):  # one engine runs both, and their answers agree
    print(vitrail.predict([photo], model))
