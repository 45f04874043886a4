"""Other people's trainers on the checkpoint store: Hugging Face ``Trainer`` and Lightning.

Import ``vescale_train.integrations.hugging_face`` or ``vescale_train.integrations.lightning``: each needs its library.
"""
