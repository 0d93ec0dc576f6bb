"""Data: rows of any file and a chat template become a tokenized data set, which is read back in any order.

In: files, URLs, data sets of the hub; a tokenizer. Out: samples, which are mappings by column name, and their sidecar.
Stores (files anywhere) < chat (masks), columns (kinds of data) < rows (writing) < tokenized (reading); packers apart.
"""
