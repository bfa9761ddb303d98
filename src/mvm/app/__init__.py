"""The local page of `mvm app`: its fields (form), what is computed (walk, plane), shown (lines, show) and served."""
