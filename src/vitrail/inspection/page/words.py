"""What the report calls its sections, in their order, and how it introduces them."""

from __future__ import annotations

TITLES = {
    "accuracy": "How good it is",
    "mistakes": "Mistakes",
    "doubtful": "Perhaps mislabelled",
    "confusions": "Confusions",
    "classes": "Class by class",
    "measures": "How well it answers",
    "worst": "The worst answers",
    "tables": "In detail",
    "rollout": "What it looks at",
    "components": "Patch features (PCA)",
    "tokens": "Patch similarity",
    "curves": "Training",
    "card": "The card",
    "distance": "Attention distance",
    "filters": "Embedding filters",
    "positions": "Position embeddings",
    "layers": "Layers alike",
    "files": "Files",
}
LEADS = {
    "accuracy": "How often its first guess is right. On other images of the same kind, expect a share in the interval.",
    "mistakes": "Photos with their label, what the model takes them for, and how sure it is of that.",
    "doubtful": """Photos that were predicted without having been learned from, and confidently as another class: the
        label may be wrong. Look at them before you trust either.""",
    "confusions": "What is most often taken for what.",
    "classes": "How often it is right on each class.",
    "measures": "The measures of its task. On other images of the same kind, expect values in the intervals.",
    "worst": "Photos with what the model answers, and below it what is true.",
    "tables": "The same measures one by one.",
    "card": "What it is, and how an image is prepared before it sees it.",
    "rollout": """Where in an image the answer comes from. Rollout follows attention from the last layer down to the
        image, as in Figures 6 and 14 of the paper; one layer is a single step, and can be seen head by head.""",
    "components": """What the model tells apart in the images: patches of similar colour have similar features. The
        colours are the first three principal components of the features of all patches, with nothing removed.""",
    "tokens": """How similar what a layer knows of one patch is to what it knows of every other, by cosine: click on a
        patch to choose it. Early layers tend to group by colour and texture, later ones by what belongs together.""",
    "distance": """How far from a patch lies what it attends to, in pixels of the image: a dot for each head, as in
        Figure 7 (right) of the paper. There some heads reach over the whole image in the lowest layers already while
        others stay near, and with depth all of them reach far.""",
    "filters": """The first principal components of the weights that turn pixels into tokens, as in Figure 7 (left) of
        the paper; grey is zero. After training they look like a basis for what is inside a patch: edges, blobs,
        colours. Before it they are noise.""",
    "positions": """A small map for each patch: how similar its position embedding is to that of every other patch, as
        in Figure 7 (centre) of the paper. Where a model has learned the shape of an image, a patch is most like those
        near it, and like those in its row and its column.""",
    "layers": """How alike what two layers know is, by linear CKA: 1 where one is the other turned and scaled, 0 where
        they share nothing. The paper has no such figure. A bright square on the diagonal is a run of layers that
        change little.""",
    "curves": "What the run measured while it trained.",
    "files": "Every figure as PNG and SVG, and the numbers behind it.",
}
