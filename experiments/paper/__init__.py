"""The results of the FOP paper (Moskovitz et al., 2020), run again."""
