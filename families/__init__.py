"""What reads a packed row: text models, text models with images, classifiers."""
