"""Model families that read packed rows: text models, vision-language models, classifiers."""
