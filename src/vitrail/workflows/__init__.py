"""The verbs that combine several rooms: train, finetune, quickstart, a linear head, the report after a run."""
