"""These modules say what cannot work together, found before anything is loaded, a module for each kind of part."""
