"""The report: one run of a store as one self-contained page, with pictures in inline SVG and no script."""
