"""Layer-wise Hessian structure: sources 002 and 000, chapter 4 and appendix C."""
