/* What a page's layout says of itself, for test_in_a_browser.py. */
window.audits = (() => {
  const all = () => [...document.querySelectorAll("article *")]

  const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true })
  const rgba = (color) => {
    probe.clearRect(0, 0, 1, 1)
    probe.fillStyle = color
    probe.fillRect(0, 0, 1, 1)
    const [r, g, b, a] = probe.getImageData(0, 0, 1, 1).data
    return [r, g, b, a / 255]
  }
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3]))
  const background = (element) => {
    const layers = []
    for (let at = element; at; at = at.parentElement)
      layers.push(rgba(getComputedStyle(at).backgroundColor))
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255])
  }
  const luminance = (color) => {
    const [r, g, b] = color
      .map((c) => c / 255)
      .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    return 0.2126 * r + 0.7152 * g + 0.0722 * b
  }
  const ownText = (element) =>
    [...element.childNodes].filter((n) => n.nodeType === Node.TEXT_NODE)
      .map((n) => n.data).join("").trim()
  const isSeen = (element) =>
    element.checkVisibility({ opacityProperty: true, visibilityProperty: true })

  /* Text whose contrast with its background is below WCAG 2.1, level AA. */
  const faint = () => {
    const found = {}
    for (const element of all()) {
      if (!ownText(element) || !isSeen(element)) continue
      if (element.closest("svg, .headerlink")) continue
      const style = getComputedStyle(element)
      const below = background(element)
      const [one, two] = [luminance(over(rgba(style.color), below)), luminance(below)]
      const ratio = (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05)
      const size = parseFloat(style.fontSize)
      const isLarge = size >= 24 || (size >= 18.66 && style.fontWeight >= 700)
      if (ratio < (isLarge ? 3 : 4.5))
        found[`${element.tagName}.${element.className} ${style.color}`] =
          `${ratio.toFixed(2)}: ${ownText(element).slice(0, 40)}`
    }
    return found
  }

  /* Elements that reach beyond the screen, and that nothing around them scrolls. */
  const scrolls = (element) => {
    for (let at = element; at !== document.body; at = at.parentElement)
      if (/auto|scroll|hidden/.test(getComputedStyle(at).overflowX)) return true
    return false
  }
  const wide = () => {
    const edge = document.documentElement.clientWidth + 1
    return all()
      .filter((element) => element.getBoundingClientRect().right > edge && !scrolls(element))
      .map((element) => `${element.tagName}.${element.className}`)
      .slice(0, 5)
  }

  const headings = () =>
    [...document.querySelectorAll("article :is(h1, h2, h3, h4, h5, h6)")]
      .map((element) => Number(element.tagName[1]))

  return { faint, wide, headings }
})()
