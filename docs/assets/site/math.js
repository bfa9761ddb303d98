// Formulas: arithmatex writes \( \) and \[ \] into elements of class arithmatex, KaTeX draws them.
document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll(".arithmatex").forEach(element => {
    const text = element.textContent.trim()
    const display = text.startsWith("\\[")
    katex.render(text.slice(2, -2), element, {displayMode: display, throwOnError: false})
  })
})
