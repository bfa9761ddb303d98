"""The local page of `mvm app`: what is asked (form), made (walk, plane), told (lines, show, film) and served (page)."""
